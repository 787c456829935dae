"""What every stage uses: run directories, JSON lines, progress, several processes, results."""
