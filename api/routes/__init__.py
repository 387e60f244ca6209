"""Thin routes: read the request, call one function, shape the answer."""
