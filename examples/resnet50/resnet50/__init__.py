"""What the programs beside this folder are made of; one role a file."""
