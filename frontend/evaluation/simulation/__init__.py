"""What users simulate: fleets of engines that need no machines."""
