"""Dispatch and combine of few tokens: one kernel each, which pushes rows and routes as lines with their own mark."""
