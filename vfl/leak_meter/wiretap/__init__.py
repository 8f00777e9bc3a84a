"""What anybody on the network learns from sizes and times of messages, without reading them."""
