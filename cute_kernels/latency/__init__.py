"""Dispatch and combine of few tokens: one kernel each, rows and routes pushed as lines that carry their own mark."""
