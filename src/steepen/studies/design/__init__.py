"""Studies of architecture design: block allocation, passes, growth target and timing."""
