"""Answers to figures, tables and one HTML page that opens offline; and to a terminal."""
