"""The dashboard: server-rendered pages, readable with scripts off, live with one small script."""
