"""Where recordings come from: simulators that are walked through, and files of cameras and programs."""
