"""Studies that train ladders of arms and judge their laws."""
