"""What a request, a step and a failure are. Imports no torch and nothing else of the package."""
