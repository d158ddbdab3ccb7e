"""Routing of requests to engines: the code that clients route with, and simulations of them."""
