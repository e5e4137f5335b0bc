"""What people read: tables, the verdict on speculation, plots and timelines."""
