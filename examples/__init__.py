"""Programs around Headwater that are in no package."""
