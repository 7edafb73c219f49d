"""`make offline`: a folder that installs Headwater on a machine that reaches no package index."""
