-- The statements that take $1 (an interval) off every time that the tables of schema $1 remember, one a table.
SELECT format('UPDATE %I.%I SET %s', c.table_schema, c.table_name,
              string_agg(format('%1$I = %1$I - $1::interval', c.column_name), ', ' ORDER BY c.ordinal_position)) AS statement
  FROM information_schema.columns c
  JOIN information_schema.tables t ON t.table_schema = c.table_schema AND t.table_name = c.table_name AND t.table_type = 'BASE TABLE'
 WHERE c.table_schema = $1 AND c.data_type = 'timestamp with time zone' AND c.is_generated = 'NEVER'
 GROUP BY c.table_schema, c.table_name ORDER BY c.table_name
