"""What people read: tables, progress and reports. All but `optimizer` needs `shardstep[cli]`."""
