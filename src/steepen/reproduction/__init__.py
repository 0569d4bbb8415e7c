"""The paper's figures, tables and claims, from the measurements that its authors publish."""
