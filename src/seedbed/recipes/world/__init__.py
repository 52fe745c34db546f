"""World emulators: the next frame from remembered frames and a control, stable on their own output."""
