"""The functions that `import steepen` offers, and the results they return. Everything here is lazy."""
