"""Dispatch and combine for decode: one kernel each, which pushes rows and routes as lines with their own mark."""
