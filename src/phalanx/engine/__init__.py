"""Executes one StepPlan on the device; remembers nothing about users."""
