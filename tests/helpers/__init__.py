"""What tests share. Nothing here is collected by pytest."""
