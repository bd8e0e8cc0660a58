"""
The learner's decisions, pure: no clock, socket, file, thread, torch or proto. Time is an argument.
"""
