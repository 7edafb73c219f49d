"""Reports as one HTML file each: text, tables and plots, with nothing loaded from elsewhere."""
