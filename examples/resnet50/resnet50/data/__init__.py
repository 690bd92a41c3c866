"""The sources of pictures (folder, digits, synthetic), and the pipeline to the devices."""
