"""Nested models of two ladders, the tests between them, and checks of their assumptions."""
