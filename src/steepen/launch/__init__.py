"""Run specs → records, wherever they run: local processes, Slurm jobs, Ray tasks."""
