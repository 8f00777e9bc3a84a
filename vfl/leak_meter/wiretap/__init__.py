"""What any observer of the network learns from sizes and times of messages without reading them."""
