"""The models of a server, which are loaded when requests name them and unloaded when they are idle."""
