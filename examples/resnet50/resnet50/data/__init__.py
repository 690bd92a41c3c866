"""Pictures: where they come from (folder, digits, synthetic), and the pipeline to the devices."""
