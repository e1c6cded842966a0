"""Training on parameter servers: the coordinator, its servers, and the rows that workers read by themselves."""
