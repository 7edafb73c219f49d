"""The models that Headwater ships: for the demo, for the tests, and to be read as examples."""
