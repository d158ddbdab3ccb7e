"""Every message that crosses a process boundary, its encoding, and the sockets it travels on."""
