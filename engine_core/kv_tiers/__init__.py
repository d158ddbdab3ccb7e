"""Tiers below KV memory: pages that are not there, and come from elsewhere faster than they are computed."""
