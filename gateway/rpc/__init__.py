"""The public gRPC side of a gateway: the Generation service and the Open Inference Protocol, beside REST."""
