"""The server's own documentation: the OpenAPI document and the page that shows it."""
