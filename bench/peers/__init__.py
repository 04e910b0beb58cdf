"""Systems that chunkc is compared with: in processes that train, and as plans of the simulator."""
