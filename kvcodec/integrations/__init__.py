"""Use of kvcodec in other libraries; nothing here is imported unless it is asked for."""
