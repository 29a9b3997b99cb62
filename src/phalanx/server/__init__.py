"""HTTP: schema, routes, streams."""
