"""What crosses a process boundary, and its encoding."""
