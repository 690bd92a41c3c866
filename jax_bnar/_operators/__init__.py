"""What users call: operators on arrays, their validation and their documentation."""
