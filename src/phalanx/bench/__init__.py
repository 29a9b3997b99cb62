"""The load client: speaks HTTP only and imports nothing else of the package."""
