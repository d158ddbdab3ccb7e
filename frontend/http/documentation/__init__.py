"""The server's documentation: `/openapi.json`, and `/docs`, the page that shows it."""
