"""What people read in a terminal: tables and progress. Needs the extra `shardstep[cli]`."""
