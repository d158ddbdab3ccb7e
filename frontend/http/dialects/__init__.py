"""The APIs of other servers, each a dialect with its routes and errors; `registry` lists them."""
