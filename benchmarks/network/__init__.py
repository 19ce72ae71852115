"""The rig: ranks forked from one process, over loopback or over network namespaces with links of a set rate."""
