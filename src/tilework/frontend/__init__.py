"""What every frontend needs and no other room owns. A frontend translates a vendor's names; what it does beyond that is here, once."""
