"""The results explorer: one page over many run folders and studies."""
