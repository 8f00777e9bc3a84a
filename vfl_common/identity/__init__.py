"""Who a party is: the federation's authority, a party's certificate and key, and why a connection fails."""
