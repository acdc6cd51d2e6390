"""Between stores: what is sent, in how few requests, what that costs, and the readback of all of it."""
