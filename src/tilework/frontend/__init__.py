"""What every frontend needs and no other room owns. A frontend translates names; what it does beyond that is here."""
