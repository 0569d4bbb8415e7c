"""Records to laws: fits, multipliers, tests, power and forecasts (numpy and scipy only)."""
