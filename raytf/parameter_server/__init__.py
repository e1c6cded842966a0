"""Training on parameter servers: the coordinator, its servers, and rows that workers read themselves."""
