"""Generated protobuf code; edit protos/meshpb instead."""
